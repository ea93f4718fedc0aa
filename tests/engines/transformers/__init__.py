"""Hugging Face's Trainer and Accelerate under distwrap's launchers, and beside its helpers."""

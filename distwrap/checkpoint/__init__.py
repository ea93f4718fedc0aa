"""Checkpoints in one file or in parts, written completely or not at all, and safe to load."""

from distwrap.checkpoint.formats import CheckpointIO
from distwrap.checkpoint.resume import RunState, run_state
from distwrap.checkpoint.safetensors_format import SafetensorsIO
from distwrap.checkpoint.saving import load, save, wait_for_saves

__all__ = ["CheckpointIO", "RunState", "SafetensorsIO", "load", "run_state", "save", "wait_for_saves"]

"""Checkpoints: whole or not at all, safe to load, in one file or in parts."""

from distwrap.checkpoint.formats import CheckpointIO
from distwrap.checkpoint.resume import RunState, run_state
from distwrap.checkpoint.safetensors_format import SafetensorsIO
from distwrap.checkpoint.saving import load, save, wait_for_saves

__all__ = ["CheckpointIO", "RunState", "SafetensorsIO", "load", "run_state", "save", "wait_for_saves"]

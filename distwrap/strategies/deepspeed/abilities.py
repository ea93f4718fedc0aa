"""Features that DeepSpeed has on some nodes only, checked when a run starts."""

from __future__ import annotations

from importlib.util import find_spec

from distwrap.errors import OptionError, PrecisionError
from distwrap.group.world import World
from distwrap.strategies.deepspeed.package import environment, import_deepspeed, quiet


def require_fp16(world: World) -> None:
    """Refuse fp16 on a device for which DeepSpeed has none.

    Raises:
        PrecisionError: the device has no float16.
    """
    import_deepspeed(world, verbose=False)
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        what = "processor: that needs AVX512-FP16 or AMX-FP16" if world.device.type == "cpu" else "device"
        raise PrecisionError(
            f"rank {world.placement.rank}: precision='fp16' under strategy='deepspeed', which has no float16 on this "
            f"{what}. Use precision='bf16' or '32'."
        )


def require_nvme(world: World, *, weights: bool) -> None:
    """Refuse offload to NVMe if DeepSpeed's operator for it cannot be built, or would round weights.

    Args:
        world: the world of the run.
        weights: whether weights are offloaded too, and not only the optimizer's state.

    Raises:
        OptionError: something is missing, which the message names.
        PrecisionError: weights in float32 would be rounded.
    """
    import_deepspeed(world, verbose=False)
    from deepspeed.accelerator import get_accelerator

    rank = world.placement.rank
    with quiet(False), environment(world):
        from deepspeed.ops.op_builder import AsyncIOBuilder

        builder = AsyncIOBuilder()
        if find_spec(builder.absolute_name()) is None and not builder.is_compatible():
            raise OptionError(
                f"rank {rank}: offload='nvme' under strategy='deepspeed', whose operator async_io cannot be "
                "built on this node: it needs a C compiler, and libaio with its header (apt-get install g++ "
                "libaio-dev). Install them, or use offload='cpu'."
            )
    # There its zero.Init uses bfloat16, whatever type it is given (0.19.8, Init._set_dtype).
    if weights and world.options.precision == "32" and not get_accelerator().is_fp16_supported():
        raise PrecisionError(
            f"rank {rank}: offload='nvme' with precision='32' under strategy='deepspeed', which keeps weights on NVMe "
            f"in bfloat16 on a device without float16, as this {world.device.type}: they would be rounded. Use "
            f"precision='bf16', or keep the weights in memory: "
            f"config={{'zero_optimization': {{'offload_param': {{'device': 'none'}}}}}}."
        )

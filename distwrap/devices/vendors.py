"""Accelerators of other makers than NVIDIA: which package brings each to torch, and what hides its devices.

What torch does with one is asked of torch. This table is for messages: of a device that is not there, and of too few.
"""

from typing import NamedTuple


class Vendor(NamedTuple):
    """A type of accelerator.

    Attributes:
        maker: what it is called, for messages.
        package: the one that makes torch know it, as one imports it; empty where torch does by itself.
        visible_by: the variable that says which of its devices a process sees.
        source: where that is documented.
        collectives: the module that brings its process groups' backend, where the package does not.
        has_float64: whether all of its devices compute with numbers of 64 bits, as far as torch's package is to know.
    """

    maker: str
    package: str
    visible_by: str
    source: str
    collectives: str = ""
    has_float64: bool = True


_DOCS = "https://docs.pytorch.org/docs/stable/notes"

# habana's HABANA_VISIBLE_DEVICES is read by the container runtime alone; HCCL's table of types has no float64.
VENDORS = {
    "xpu": Vendor("Intel's GPUs", "", "ZE_AFFINITY_MASK", f"{_DOCS}/get_start_xpu.html"),
    "hpu": Vendor("Intel's Gaudi", "habana_frameworks.torch", "HABANA_VISIBLE_MODULES",
        "https://docs.habana.ai/en/latest/PyTorch/", "habana_frameworks.torch.distributed.hccl", has_float64=False),
    "npu": Vendor("Huawei's Ascend", "torch_npu", "ASCEND_RT_VISIBLE_DEVICES", "https://github.com/Ascend/pytorch",
        has_float64=False),
    "mlu": Vendor("Cambricon's MLU", "torch_mlu", "MLU_VISIBLE_DEVICES", "https://github.com/Cambricon/torch_mlu"),
    "musa": Vendor("Moore Threads' GPUs", "torch_musa", "MUSA_VISIBLE_DEVICES",
        "https://github.com/MooreThreads/torch_musa"),
    "xla": Vendor("Google's TPUs", "torch_xla", "TPU_VISIBLE_CHIPS", "https://docs.pytorch.org/xla/"),
    "mps": Vendor("Apple's GPUs", "", "", f"{_DOCS}/mps.html", has_float64=False),
}  # fmt: skip

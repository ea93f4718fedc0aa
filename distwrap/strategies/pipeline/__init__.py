"""Pipeline parallelism: the blocks of a model run in stages on several ranks."""

from distwrap.strategies.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]

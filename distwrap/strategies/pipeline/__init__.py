"""Pipeline parallelism: the blocks of a model in stages on several ranks."""

from distwrap.strategies.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]

"""Digits with every pixel four times, 16x16: the last blocks of ResNet-18 would see one pixel of 8x8."""

from dataclasses import replace

from fedcommons.data.datasets import Source, digits
from fedcommons.data.examples import Examples


def digits16() -> Source:
    """The data set digits with images of 16x16."""
    source = digits()

    def larger(examples: Examples) -> Examples:
        return replace(examples, x=examples.x.repeat_interleave(2, 2).repeat_interleave(2, 3))

    return replace(source, train=larger(source.train), test=larger(source.test))

"""Presets of the gradient coding study: images as in the paper, as in the authors' released code, or fewer."""

from dataclasses import dataclass

PER_CLASS = 30  # images per class, section IV-A


@dataclass(frozen=True)
class Preset:
    """The data set of a preset, and the numbers of images, repetitions and rounds.

    white: value of a white pixel. first: use the first images of each class (True) or random images. n_test: number of
    test images, None for all. per_class: a share c of each class (True) or of all images is not private.
    """

    dataset: str = "mnist"
    white: float = 1.0
    first: bool = False
    n_test: int | None = None
    per_class: bool = True
    repetitions: int = 1000
    rounds: int = 50


PRESETS = {
    "authors": Preset(white=255.0, first=True, n_test=500, per_class=False),  # as in the authors' released code
    "paper": Preset(),
    "small": Preset("digits", repetitions=200),
    "smoke": Preset("digits", repetitions=4, rounds=6),
}

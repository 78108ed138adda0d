"""The export formats of a trained model, and the packages that they require; this module does not import torch."""

from importlib.util import find_spec

from fedcommons.errors import UserError, unknown

NEEDS = ("onnx", "onnxscript")
"""Packages that torch needs to write ONNX."""


def require(form: str) -> None:
    """Check that a trained model can be exported to the format ``form``.

    Raises:
        UserError: there is no such format, or a package is missing.
    """
    if form != "onnx":
        raise unknown("export", form, ["onnx"])
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        raise UserError(f"--export onnx needs the package {missing[0]}: pip install 'fedcommons[onnx]'.")

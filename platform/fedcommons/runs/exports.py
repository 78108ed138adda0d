"""The forms to which a trained model can be exported, and what they need; known before torch is there."""

from importlib.util import find_spec

from fedcommons.errors import UserError, unknown

NEEDS = ("onnx", "onnxscript")
"""Packages by which torch writes ONNX."""


def require(form: str) -> None:
    """Refuse an export that cannot be.

    Raises:
        UserError: there is no such form, or a package is missing.
    """
    if form != "onnx":
        raise unknown("export", form, ["onnx"])
    if lacking := [name for name in NEEDS if find_spec(name) is None]:
        raise UserError(f"--export onnx needs the package {lacking[0]}: pip install 'fedcommons[onnx]'.")

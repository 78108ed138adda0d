"""Named tensors over one flat buffer."""

import pickle

import pytest
import torch

from fedcommons.flat_tensors import (  # fmt: skip
    Flat,
    Layout,
    add,
    flatten,
    put,
    scale,
    select,
    sq_norm,
    sub,
)

LAYOUT = Layout(("weight", "bias", "scalar"), ((2, 3), (2,), ()))


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> Flat:
    """Normal numbers under the names of LAYOUT."""
    return Flat(LAYOUT, torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed)).to(dtype))


def test_arithmetic_equals_that_of_the_named_parts_and_leaves_its_arguments() -> None:
    a, b = numbers(0), numbers(1)
    for name in LAYOUT.names:
        assert torch.equal(sub(a, b)[name], a[name] - b[name])
        assert torch.equal(scale(a, 0.3)[name], a[name] * 0.3)
        torch.testing.assert_close(add(a, b, 0.3)[name], a[name] + 0.3 * b[name])
        assert torch.equal(add(a, b)[name], a[name] + b[name])
    for result in (add(a, b, 0.0), sub(a, b), scale(a, 2.0)):
        result.buffer.fill_(7)
    assert torch.equal(a.buffer, numbers(0).buffer)
    assert torch.equal(b.buffer, numbers(1).buffer)


def test_adding_keeps_the_type_and_computes_in_the_wider_one() -> None:
    # 2^24 is where float32 stops counting by ones
    a = Flat(Layout(("x",), ((1,),)), torch.tensor([2.0**24]))
    b = Flat(a.layout, torch.tensor([1.0 + 2.0**-25], dtype=torch.float64))
    result = add(a, b)
    assert result.buffer.dtype == torch.float32
    # exact sum 2^24 + 1 + 2^-25 is nearer to 2^24 + 2; b rounded to float32 first would tie to even, 2^24
    assert result.buffer.item() == 2.0**24 + 2
    assert add(b, a).buffer.dtype == torch.float64


def test_the_squared_norm_is_accumulated_in_float64() -> None:
    x = torch.full((4096,), 1.0)
    x[0] = 2.0**13  # its square, 2^26, swallows every later 1 in float32
    exact = 2.0**26 + 4095
    assert sq_norm(x) == sq_norm(Flat(Layout(("x",), ((4096,),)), x)) == sq_norm(x.double()) == exact
    assert sq_norm(torch.full((2,), 1e30)) == pytest.approx(2e60)  # beyond float32's range


def test_put_is_the_inverse_of_select_and_refuses_other_parts() -> None:
    x, y = numbers(0), numbers(1)
    for names in ([], ["bias"], ["scalar", "weight"], ["bias", "scalar", "weight"]):
        mixed = put(x, select(y, names))
        assert mixed.layout == LAYOUT
        assert all(torch.equal(mixed[name], (y if name in names else x)[name]) for name in LAYOUT.names)
        assert torch.equal(put(x, select(x, names)).buffer, x.buffer)
    assert torch.equal(x.buffer, numbers(0).buffer)  # it is as it was
    wide = select(numbers(1, torch.float64), ["bias"])
    assert put(x, wide).buffer.dtype == torch.float32
    assert torch.equal(put(x, wide)["bias"], wide["bias"].float())
    with pytest.raises(ValueError, match="no tensor 'head'"):
        put(x, flatten({"head": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"bias has shape \(2,\), and not \(1,\)"):  # which would be spread over it
        put(x, flatten({"bias": torch.zeros(1)}))


def test_unpickling_copies_also_from_shared_memory() -> None:
    """Ray hands out-of-band buffers over read-only and shared: writing into one would change every other reader's."""
    buffers: list[pickle.PickleBuffer] = []
    a = Flat(LAYOUT, numbers(0).buffer.requires_grad_())
    content = pickle.dumps(a, protocol=5, buffer_callback=buffers.append)
    assert buffers, "the buffer should travel out of band, not inside the pickle"
    shared = [memoryview(bytes(b.raw())) for b in buffers]  # read-only
    first, second = (pickle.loads(content, buffers=shared) for _ in range(2))
    again = pickle.loads(pickle.dumps(a))
    for copy in (first, again):
        assert (copy.layout, copy.buffer.dtype, copy.buffer.requires_grad) == (LAYOUT, torch.float32, False)
        assert torch.equal(copy.buffer, numbers(0).buffer)
        copy.buffer.zero_()
    assert torch.equal(second.buffer, a.buffer)

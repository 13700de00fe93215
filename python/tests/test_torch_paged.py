"""Pages in E4M3 where no GPU is: shapes, layouts and the operator as compilers see it."""

import pytest

torch = pytest.importorskip("torch")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402


def test_pages_of_values_have_groups_of_sixteen_tokens():
    pages = fp8.value_pages(3, 64, 2, 128)
    assert pages.shape == (3, 2, 4, 16, 8, 16) and pages.dtype == torch.float8_e4m3fn
    assert not pages.view(torch.uint8).any()
    with pytest.raises(sigmascale.ArgumentError, match="groups of 16 by 8"):
        fp8.value_pages(3, 24, 2, 128)


def test_the_operator_has_shapes_without_running():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        make = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="cuda")
        cache, ints = make(9, 64, 2, 128, dtype=torch.float8_e4m3fn), make(3, 3, dtype=torch.int32)
        one = make(3, 2, dtype=torch.float32)
        new = make(3, 4, 2, 128)
        out, lse = torch.ops.sigmascale.paged_attention(
            make(3, 4, 8, 128), cache, cache, ints, ints[0], new, new, one, one, one, None, None, False, None, True, 0.1
        )
    assert out.shape == (3, 4, 8, 128) and out.dtype == torch.bfloat16 and lse.shape == (3, 8, 4)

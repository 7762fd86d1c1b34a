"""Rows selected and cut in two, and summed back, against indexing and its gradient by autograd."""

import pytest
import torch
from megaswift.bridge.layers.packed_seqs import Segments

CASES = {"narrow": (24, 8, 8), "pieces": (3000, 2040, 7), "one column": (2, 1, 5)}


def selected(index: torch.Tensor) -> Segments:
    ends = torch.tensor([0, len(index)])
    return Segments([len(index)], [len(index)], ends, ends, index)


@pytest.mark.parametrize(("size", "width", "total"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_split_and_summed(device, dtype, size, width, total):
    from megaswift.bridge.kernels.selected_rows import split_rows, sum_rows

    generator = torch.Generator().manual_seed(0)
    index = torch.randint(total - 1, (13,), generator=generator).to(device)  # the last row is not selected
    rows = torch.randn(total, size, generator=generator).to(device, dtype).requires_grad_()
    first, second = split_rows(rows, index, width)
    assert torch.equal(torch.cat((first, second), dim=1), rows[index])

    grads = torch.randn(len(index), size, generator=generator).to(device, dtype)
    copies = rows.detach().float().requires_grad_()
    (wanted,) = torch.autograd.grad(copies[index], copies, grads.float())
    order, starts = selected(index).key_copies(total)
    summed = sum_rows(*(part.contiguous() for part in grads.split((width, size - width), dim=1)), order, starts)
    torch.testing.assert_close(summed, wanted.to(dtype), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert not summed[-1].any()

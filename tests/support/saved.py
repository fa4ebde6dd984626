"""What the tests of runs on disk share."""

import torch


def same(left, right) -> bool:
    """Equal down to the types and the bits."""
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape, left.stride()) != (right.dtype, right.shape, right.stride()):
            return False
        return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)

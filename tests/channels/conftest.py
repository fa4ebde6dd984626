"""Let the tests of this folder share their helpers, and mark what is known to be broken."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

STALE = "a write of one element, or by an operator without a rule, leaves the tensor known as uniform or zero"
PLACES = "indices of maxima, medians and modes are taken for zero where their channel is zero"
UNIFORM = "an axis of equal values is taken for harmless"
BROKEN: dict = {}
_OLD = {
    "test_trap[zeros_with_one_entry]": STALE,
    "test_trap[first_channel_set]": STALE,
    "test_trap[first_channel_set_by_slice]": STALE,
    "test_trap[zeros_index_copy]": STALE,
    "test_trap[zeros_masked_scatter]": STALE,
    "test_trap[zeros_put]": STALE,
    "test_trap[zeros_custom]": STALE,
    "test_trap[alias_of_zeros]": STALE,
    "test_trap[replaced_data]": "assigning to .data is not seen",
    "test_trap[written_with_out]": "out= is not among the leading arguments, where writes are looked for",
    "test_trap[counted]": UNIFORM,
    "test_trap[edges_of_ones]": UNIFORM,
    "test_trap[shared_with_ones]": UNIFORM,
    "test_trap[shared_with_mean_of_input]": UNIFORM,
    "test_trap[norm_with_fixed_mean]": UNIFORM,
    "test_trap[norm_with_fixed_shift]": UNIFORM,
    "test_trap[norm_with_waking_shift]": "group norm does not ask whether its affine tensors are zero",
    "test_trap[diagonal]": "diagonal loses the channels without freezing them",
    "test_trap[noise_from_channels]": "bernoulli of a tensor loses the channels without freezing them",
    "test_trap[weights_that_are_never_zero]": "a product of two weights does not ask whether one of them is zero",
    "test_trap[data_and_weight]": "a consumed weight that is also data is taken for zero, but not masked",
    "test_trap[vector_times_matrix]": "squeeze_ changes the shape before its rule looks",
    "test_trap[unsqueezed_in_place]": "unsqueeze_ changes the shape before its rule looks",
    "test_trap[places_of_maxima]": PLACES,
    "test_trap[places_of_adaptive_maxima]": PLACES,
    "test_trap[places_of_medians]": PLACES,
    "test_trap[places_of_modes]": PLACES,
    "test_output_that_hides_its_tensors": "tensors in objects without __dict__ are not found",
    "test_squeeze_of_the_last_channel": "squeeze() drops the channel axis once one channel is left",
    "test_numbers_and_a_list_of_the_same_sizes": "where a list fits, single numbers are not looked for",
    "test_shrinking_leaves_spectral_norm_alone": "shrinking reads module.weight, which has side effects",
    "test_code_that_looks_at_the_number_of_channels[even]": "the probe compares numbers for one size only",
    "test_each_kind_leaves_channels[tokens]": "in_features == out_features ties the two sides of a linear layer",
    "test_training_that_cannot_run": "layers seen before training mode raised are not frozen",
    "test_each_channel_alone[folded into the batch]": "MACs do not follow channels on the batch axis of a convolution",
}
"""Known faults; each test must be taken off this list when it passes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in BROKEN and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xfail(reason=BROKEN[item.name], strict=True))

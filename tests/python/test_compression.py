# SPDX-License-Identifier: Apache-2.0
"""`bitopk.Compression` as a value: what it accepts, what it refuses, and what it says then."""

import inspect
import pickle

import numpy as np
import pytest
from bitopk import Compression
from bitopk.errors import Error, InvalidArgumentError


def test_parameters_of_topk_are_those_of_the_design():
    parameters = dict(inspect.signature(Compression.topk).parameters)
    parameters.pop("unknown")
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults == {
        "density": None,
        "density_down": None,
        "k": None,
        "k_down": None,
        "scope": "tensor",
        "value_format": "float32",
        "exchange": "auto",
        "dense_fallback": False,
        "worker_memory": True,
        "server_memory": True,
        "memory_decay": 1.0,
        "nonfinite": "propagate",
        "start_step": 0,
        "dense_below": 1024,
        "seed": 0,
        "rules": (),
    }
    assert parameters["density_down"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters["k"].kind is inspect.Parameter.KEYWORD_ONLY


def test_density_down_is_density_unless_given():
    assert Compression.topk(0.01).density_down == 0.01
    assert Compression.topk(0.01, 1.0).density_down == 1.0
    assert Compression.topk(0.01) == Compression.topk(0.01, 0.01)
    assert Compression.topk(k=5).k_down == 5


@pytest.mark.parametrize(
    "spec",
    [
        Compression.topk(0.01),
        Compression.topk(0.01, 1.0),
        Compression.topk(k=3, k_down=4, scope="global", memory_decay=0.5, seed=2**64 - 1),
        Compression.topk(0.1, rules=[("*.bias", "dense"), ["fc?", Compression.topk(k=1)]]),
        Compression.topk(0.1, worker_memory=False, nonfinite="skip", value_format="bfloat16"),
        Compression.none,
        Compression.fp16,
    ],
    ids=repr,
)
def test_specs_survive_pickle_repr_and_hash(spec):
    assert pickle.loads(pickle.dumps(spec)) == spec
    again = eval(repr(spec), {"Compression": Compression})
    assert again == spec
    assert hash(again) == hash(spec)


def test_specs_are_frozen():
    with pytest.raises(AttributeError):
        Compression.topk(0.01).density = 0.5


def test_none_and_fp16_are_values_not_functions():
    assert isinstance(Compression.none, Compression)
    assert Compression.none.method == "none"
    assert Compression.fp16.method == "fp16"
    assert Compression.none != Compression.topk(1.0)


def test_numpy_scalars_become_python_ones():
    spec = Compression.topk(
        np.float64(0.25), worker_memory=np.bool_(False), start_step=np.int64(3), seed=np.uint64(7)
    )
    assert spec == Compression.topk(0.25, worker_memory=False, start_step=3, seed=7)
    assert type(spec.density) is float
    assert type(spec.start_step) is int
    assert Compression.topk(k=np.int32(3)) == Compression.topk(k=3)


INNER = Compression.topk(0.5, rules=[("a", "dense")])

BAD_OPTIONS = [
    (dict(), ["exactly one", "density", "k"]),
    (dict(density=0.1, k=3), ["exactly one", "density=0.1", "k=3"]),
    (dict(density=1), ["density must be a float in (0, 1]", "1 (int)", "did you mean k=1?"]),
    (dict(density=0.5, density_down=1), ["density_down", "did you mean k_down=1?"]),
    (dict(density=True), ["density", "True (bool)"]),
    (dict(density=0.0), ["density", "(0, 1]", "0.0"]),
    (dict(density=-0.1), ["density", "-0.1"]),
    (dict(density=1.0001), ["density", "1.0001"]),
    (dict(density=float("nan")), ["density", "nan"]),
    (dict(density=float("inf")), ["density", "inf"]),
    (dict(density="0.1"), ["density", "'0.1' (str)"]),
    (dict(density=0.1, density_down=1.5), ["density_down", "1.5"]),
    (dict(k=5, density_down=0.1), ["density_down", "k_down"]),
    (dict(density=0.1, k_down=5), ["k_down", "density_down"]),
    (dict(k=0), ["k must be an int >= 1", "0"]),
    (dict(k=-3), ["k must be", "-3"]),
    (dict(k=True), ["k must be", "True (bool)"]),
    (dict(k=3.0), ["k must be", "3.0 (float)"]),
    (dict(k=3, k_down=0), ["k_down must be", "0"]),
    (dict(density=0.1, scope="layer"), ["scope", "'tensor'", "'global'", "'layer'"]),
    (dict(density=0.1, scope="globl"), ["did you mean 'global'?"]),
    (dict(density=0.1, value_format="natural"), ["value_format", "'float16'", "'natural'"]),
    (dict(density=0.1, value_format=16), ["value_format", "16 (int)"]),
    (dict(density=0.1, exchange="shard"), ["exchange", "'sharded'", "'shard'"]),
    (dict(density=0.1, nonfinite="ignore"), ["nonfinite", "'propagate'", "'skip'", "'raise'"]),
    (dict(density=0.1, dense_fallback=1), ["dense_fallback", "1 (int)"]),
    (dict(density=0.1, worker_memory="yes"), ["worker_memory", "'yes'"]),
    (dict(density=0.1, server_memory=None), ["server_memory", "None"]),
    (dict(density=0.1, memory_decay=1.5), ["memory_decay", "[0, 1]", "1.5"]),
    (dict(density=0.1, memory_decay=float("nan")), ["memory_decay", "nan"]),
    (dict(density=0.1, memory_decay=True), ["memory_decay", "True"]),
    (dict(density=0.1, start_step=-1), ["start_step", ">= 0", "-1"]),
    (dict(density=0.1, start_step=1.0), ["start_step", "1.0 (float)"]),
    (dict(density=0.1, dense_below=-1), ["dense_below", "-1"]),
    (dict(density=0.1, seed=-1), ["seed", "-1"]),
    (dict(density=0.1, seed=2**64), ["seed", "2**64 - 1"]),
    (dict(density=0.1, rules="dense"), ["rules", "'dense'"]),
    (dict(density=0.1, rules=[("a",)]), ["rules[0]", "pair"]),
    (dict(density=0.1, rules=[("a", "dense"), (3, "dense")]), ["rules[1]", "3 (int)"]),
    (dict(density=0.1, rules=[("", "dense")]), ["rules[0]", "non-empty"]),
    (dict(density=0.1, rules=[("a", "sparse")]), ["rules[0]", "'a'", "'sparse'"]),
    (dict(density=0.1, rules=[("a", 0.5)]), ["rules[0]", "0.5"]),
    (dict(density=0.1, rules=[("a", INNER)]), ["rules[0]", "'a'", "rules of its own"]),
    (
        dict(density=0.1, rules=[("a", Compression.topk(0.1, nonfinite="skip"))]),
        ["rules[0]", "nonfinite", "'skip'", "'propagate'"],
    ),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: str(value)[:60])
def test_bad_options_are_refused_with_the_reason(options, words):
    with pytest.raises(InvalidArgumentError) as caught:
        Compression.topk(**options)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, Error)
    for word in words:
        assert word in str(caught.value)


def test_unknown_options_are_named_with_the_nearest_known_one():
    with pytest.raises(TypeError, match=r"unknown option 'densty' \(did you mean 'density'\?\)"):
        Compression.topk(densty=0.1)
    with pytest.raises(TypeError, match="unknown option 'zzz'; known options: density, "):
        Compression.topk(0.1, zzz=1)


def test_a_rule_may_repeat_the_outer_nonfinite_policy():
    inner = Compression.topk(0.5, nonfinite="skip")
    Compression.topk(0.1, nonfinite="skip", rules=[("a", inner), ("b", Compression.topk(0.5))])


def test_the_first_matching_rule_wins_and_case_matters():
    inner = Compression.topk(k=7)
    spec = Compression.topk(0.1, rules=[("fc1.*", inner), ("*.bias", "dense"), ("fc1.b*", "dense")])
    assert spec.rule_for("fc1.bias") is inner
    assert spec.rule_for("fc2.bias") == "dense"
    assert spec.rule_for("fc2.weight") is spec
    assert spec.rule_for("FC1.bias") == "dense"
    assert [spec.rule_index(n) for n in ("fc1.bias", "fc2.bias", "x")] == [0, 1, -1]


def test_with_density_changes_nothing_else():
    spec = Compression.topk(k=5, scope="global", seed=9)
    assert spec.with_density(0.5) == Compression.topk(0.5, scope="global", seed=9)
    assert spec.with_density(0.5, 1.0).density_down == 1.0
    with pytest.raises(InvalidArgumentError, match="fp16"):
        Compression.fp16.with_density(0.5)

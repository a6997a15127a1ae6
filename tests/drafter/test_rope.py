"""How each layer of a drafter rotates, in every spelling of its config."""

import pytest
from support.drafters import FULL, SLIDING, V2, read_config, refused_config, without

ROPELESS = without(V2, "rope_parameters")
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_theta=1e6),
        dict(rope_parameters={"rope_theta": 1e6}),
        dict(rope_theta=1000000, rope_parameters={"rope_theta": 1e6, "type": "default"}),
        dict(rope_theta=1e6, rope_scaling=None, rope_parameters=None),
        dict(rope_theta=1e6, rope_scaling={"rope_type": None}),
        dict(rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [11, 11, 10]}),
        dict(rope_parameters={"rope_theta": 1e6, "mrope_section": [1], "mrope_interleaved": True}),
        dict(rope_parameters={SLIDING: {"rope_theta": 1e6}, FULL: {"rope_theta": 1e4}}),
        dict(rope_theta=1e4, rope_parameters={SLIDING: {"rope_theta": 1e6}}),
        dict(rope_theta=1e6, rope_parameters={FULL: {"rope_theta": 1e4}}),
        dict(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 1.0}),
    ],
    ids=[
        *("flat", "nested", "both", "flat and nulls", "null type", "mrope", "mrope section"),
        *("by layer type", "layer's own first", "other type's entry", "whole head"),
    ],
)
def test_equal_rotations(fields):
    assert read_config(ROPELESS | fields) == read_config(V2)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_yarn_in_either_place(place):
    yarn = read_config(ROPELESS | {"rope_theta": 1e6, place: YARN}).rope_parameters[0]
    assert yarn == YARN | dict(rope_theta=1e6)
    spelled = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}
    config = ROPELESS | {"rope_theta": 1e6, place: spelled}
    assert read_config(config).rope_parameters[0]["original_max_position_embeddings"] == 4096


def test_each_kind_of_layer_has_its_own_rotation():
    parameters = {SLIDING: {"rope_theta": 1e4}, FULL: YARN | {"rope_theta": 1e6}}
    args = read_config(ROPELESS | dict(layer_types=[SLIDING, FULL], rope_parameters=parameters))
    assert [rope["rope_theta"] for rope in args.rope_parameters] == [1e4, 1e6]
    assert [rope["rope_type"] for rope in args.rope_parameters] == ["default", "yarn"]


@pytest.mark.parametrize(
    "fields, named",
    [
        ({}, "rope_theta"),
        (dict(rope_parameters={"rope_type": "default"}), "rope_theta"),
        (dict(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}), "rope_theta"),
        (dict(rope_theta="1e6"), "rope_theta"),
        (dict(rope_theta=True), "rope_theta"),
        (dict(rope_theta=0), "rope_theta"),
        (dict(rope_theta=-1e4), "rope_theta"),
        (dict(rope_theta=float("inf")), "rope_theta"),
        (dict(rope_parameters={"rope_theta": "1e6"}), "rope_parameters.rope_theta"),
        (dict(rope_theta=1e6, rope_parameters=[]), "rope_parameters"),
        (dict(rope_theta=1e6, rope_parameters={SLIDING: 3}), SLIDING),
        (dict(rope_theta=1e6, rope_parameters={"rope_type": "spiral"}), "rope_type"),
        (dict(rope_theta=1e6, rope_parameters={"rope_type": ["yarn"]}), "rope_type"),
        (dict(rope_theta=1e6, rope_scaling={"type": "yarn"}), "factor"),
        (dict(rope_theta=1e6, rope_scaling={"type": "linear"}), "factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(factor="4")), "factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(factor=0)), "factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(beta_fast=0)), "beta_fast"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(beta_slow=1e308)), "beta_slow"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(factor=2**70)), "factor"),
        (dict(rope_theta=10**400), "rope_theta"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(attention_factor=2)), "attention_factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(truncate=False)), "truncate"),
        (dict(rope_theta=1e6, rope_scaling={"type": "llama3", "factor": 8}), "original_max"),
        (
            dict(
                rope_theta=1e6,
                rope_scaling=YARN | dict(rope_type="llama3", low_freq_factor=4, high_freq_factor=1),
            ),
            "high_freq_factor",
        ),
        (dict(rope_theta=1e6, rope_scaling={"type": "longrope"}), "original_max"),
        (
            dict(
                rope_theta=1e6,
                rope_scaling=dict(
                    type="longrope", original_max_position_embeddings=64, short_factor=[1.0] * 3
                ),
            ),
            "short_factor",
        ),
        (dict(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5}), "partial_rot"),
        (dict(rope_parameters={"rope_theta": 1e6}, rope_scaling=YARN), "rope_scaling"),
    ],
)
def test_rotations_refused(fields, named):
    assert named in refused_config(ROPELESS | fields)

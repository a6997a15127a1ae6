"""`doctor --trace`: a drafter broken in one way is told from one that is fine."""

import mlx.core as mx
import numpy as np
import pytest
from support.tiny import (
    DENSE,
    VOCAB,
    drafter_config,
    make_drafter,
    make_model,
    make_tokenizer,
    plain_tokens,
)

from mlx_dflash2 import embedded, load, load_drafter
from mlx_dflash2.doctor.repairs import Repair, likely_masks, make_repairs
from mlx_dflash2.doctor.trace import Outcome, Trace, bisect
from mlx_dflash2.drafter import variants
from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.evaluation.teacher_forced import (
    DraftQuality,
    TextPass,
    acceptance_length,
    measure_drafts,
    recall,
    write_text,
)
from mlx_dflash2.targets import bind

PROMPT = list(range(5, 25))
QUESTIONS = (
    "Tom has 14 apples and buys 9 more. How many apples does he have now?",
    "List five facts about the moon.",
    "Write a short Python function that returns the sum of a list.",
    "Summarise in one sentence: Maria moved to Lisbon in May. She found a job in a bakery and made "
    "many friends.",
)


@pytest.fixture(scope="module")
def tiny():
    model = make_model(DENSE)
    return model, plain_tokens(model, PROMPT, 40)


def test_forced_paths_are_the_loops_own(tiny):
    """What is drafted at an anchor is what the loop drafts there."""
    model, plain = tiny
    drafter, target = make_drafter(), bind(model)
    text = TextPass(target, PROMPT + plain, len(PROMPT), drafter.target_layer_ids)
    anchors = [20, 23, 40]
    forced = measure_drafts(drafter, text, anchors)
    for row, anchor in enumerate(anchors):
        context = drafter.make_context()
        taps = text.taps(drafter.target_layer_ids)[:, :anchor]
        drafter.extend(context, text.tokens[:anchor], taps, 0)
        token = text.tokens[anchor : anchor + 1]
        drafted = drafter.propose(target, token, context, 8).tokens
        truth = text.tokens[anchor + 1 : anchor + 8]
        assert forced.path[row].tolist() == (drafted == truth).tolist()


def test_a_text_that_goes_on_as_drafted_is_right_all_along(tiny):
    model, plain = tiny
    drafter, target, anchor = make_drafter(), bind(model), 23
    # Pair scores that outweigh the logits: another predecessor gives another path.
    codebook = drafter.candidate_selector.predecessor_codebook
    codebook.weight = 30 * codebook.weight
    tokens = [*PROMPT, *plain][: anchor + 1]
    text = TextPass(target, tokens, len(PROMPT), drafter.target_layer_ids)
    context = drafter.make_context()
    taps = text.taps(drafter.target_layer_ids)[:, :anchor]
    drafter.extend(context, text.tokens[:anchor], taps, 0)
    drafted = drafter.propose(target, text.tokens[anchor:], context, 8).tokens.tolist()
    text = TextPass(target, [*tokens, *drafted], len(PROMPT), drafter.target_layer_ids)
    quality = measure_drafts(drafter, text, [anchor])
    assert quality.path.all() and quality.among.all() and quality.chosen.all()


def test_recall_and_lengths_by_hand():
    hits = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    assert recall(hits) == [3 / 4, 2 / 3, 1 / 2]
    assert acceptance_length(hits) == 1 + (2 + 1 + 0 + 3) / 4
    assert recall(np.zeros((2, 2), bool)) == [0.0, None]
    published = [0.854, 0.803, 0.794, 0.783, 0.775, 0.759, 0.729]
    assert 1 + np.cumprod(published).sum() == pytest.approx(4.2746, abs=1e-3)


def test_variants_share_weights_and_leave_the_drafter():
    drafter = make_drafter(target_layer_ids=[0, 1, 3])
    before = variants.parameters(drafter)
    assert [t.stage for t in make_repairs(drafter, [3, 4, drafter.args.mask_token_id], 4)] == [
        "convolution", "rope", "is_causal", "mask_token_id", "mask_token_id", "candidate_selector",
    ]  # fmt: skip
    after = variants.parameters(drafter)
    assert all(before[name] is after[name] for name in before)
    twice = variants.with_conv_sides_swapped(variants.with_conv_sides_swapped(drafter))
    for name, value in variants.parameters(twice).items():
        assert mx.array_equal(value, before[name])
    assert variants.with_taps(drafter, 1, 4) is None
    assert variants.with_taps(drafter, -1, 4) is None


def test_taps_move_within_the_targets_real_depth(tiny):
    model, plain = tiny
    config = drafter_config(target_layer_ids=[0, 1, 2])
    del config["num_target_layers"]
    drafter = Drafter(DrafterArgs.from_dict(config))
    assert drafter.args.num_target_layers == 3
    trace = bisect(model, drafter, [(PROMPT, plain)], num_anchors=4)
    changes = [outcome.repair.change for outcome in trace.outcomes]
    assert "taps one layer later: [1, 2, 3]" in changes


def test_variants_of_a_quantized_drafter():
    drafter = load_drafter(embedded.drafter_path(dense=False), dtype=mx.float32)
    same = variants.variant(drafter)
    old = variants.parameters(drafter)
    for name, value in variants.parameters(same).items():
        assert value is old[name] or mx.array_equal(value, old[name])
    swapped = variants.parameters(variants.with_codebooks_swapped(drafter))
    name = "candidate_selector.{}_codebook.scales".format
    assert mx.array_equal(swapped[name("predecessor")], old[name("successor")])


def test_masks_worth_trying():
    masks = likely_masks(make_tokenizer(eos=7), VOCAB + 8)
    assert {VOCAB, VOCAB + 1, VOCAB + 7} <= set(masks)
    assert all(0 <= token < VOCAB + 8 for token in masks) and len(masks) == len(set(masks))


def forced(logprob, selector=None):
    logprob = np.array(logprob, float)
    hits = np.ones(logprob.shape, bool)
    selector = np.zeros(logprob.shape) if selector is None else np.array(selector, float)
    return DraftQuality(logprob, hits, hits, hits, selector, hits)


def test_gains_weigh_early_rows_and_skip_what_says_nothing():
    repair = Repair("x", "y", make_drafter())
    gain = repair.gains(forced([[-2.0, -2.0]]), forced([[-1.0, -2.0]]))
    assert gain == pytest.approx([1 / (1 + np.exp(-0.25))])
    gain = repair.gains(forced([[-2.0, -2.0]]), forced([[-1.0, -2.0]]), most=0.5)
    assert gain == pytest.approx([0.5 / (1 + np.exp(-0.25))])
    repair = Repair("x", "y", repair.drafter, of_selector=True)
    before = forced([[0, 0]] * 2, [[-2.0, np.nan], [np.nan, np.nan]])
    after = forced([[0, 0]] * 2, [[-1.5, np.nan], [np.nan, np.nan]])
    assert repair.gains(before, after) == pytest.approx([0.5])


def test_a_gain_counts_from_three_errors_on_and_of_what_works():
    repair, right = Repair("x", "y", make_drafter()), np.ones(4, bool)
    noise = np.tile([1.0, -1.0], 20)

    def outcome(gains, hits=right):
        return Outcome(repair, gains, gains, hits)

    assert not outcome(noise).significant and not outcome(noise).hopeless
    assert outcome(noise + 0.6).significant
    assert not outcome(noise + 0.6, ~right).significant  # and still never right
    assert not outcome(np.ones(4)).significant  # too few
    assert not Outcome(repair, noise - 0.1, noise + 0.6, right).significant  # worse on the whole
    assert outcome(noise - 0.6).hopeless
    assert outcome(np.zeros(8)).hopeless  # it changes nothing
    assert not Outcome(repair).hopeless and not Outcome(repair).significant


def test_of_two_repairs_the_better_one_is_left():
    repair, noise = Repair("x", "y", make_drafter()), np.tile([1.0, -1.0], 20)
    best, like, worse = (Outcome(repair, noise + gain) for gain in (3.0, 2.9, 2.0))
    like.gains[::4] += 0.5
    assert worse.is_behind(best) and not best.is_behind(best) and not like.is_behind(best)
    other = Outcome(Repair("x", "y", repair.drafter, of_selector=True), noise)
    assert not other.is_behind(best)  # nothing to compare


def test_random_drafter_is_no_known_mistake(tiny):
    model, plain = tiny
    trace = bisect(model, make_drafter(), [(PROMPT, plain)], [3, 4], num_anchors=20)
    lines = list(trace.lines())
    assert lines[-1].startswith("verdict:") and "another target" in lines[-1]
    assert any(line.startswith("recall@8 by position:") for line in lines)
    assert any(line.startswith("window: ") for line in lines)


def test_repairs_that_cannot_be_told_apart_are_all_named():
    drafter = make_drafter()
    best, like = (Outcome(Repair("mask_token_id", f"mask_token_id {i}", drafter)) for i in (3, 4))
    best.gains = np.ones(20)
    trace = Trace(drafter, forced(np.zeros((2, 7))), [best, like], best, None, [like])
    assert "with mask_token_id 3, or mask_token_id 4, the true tokens gain 1.00" in trace.verdict


def test_short_texts_are_refused(tiny):
    model, plain = tiny
    with pytest.raises(ValueError, match="more than 7 tokens"):
        bisect(model, make_drafter(), [(PROMPT, plain[:7])])


def test_good_drafts_within_the_window_only():
    drafter = make_drafter()
    trace = Trace(drafter, forced(np.zeros((2, 7))), [], None, (0.8, 0.1))
    assert trace.verdict.startswith("verdict: sliding_window is at fault")
    assert "no stage" in Trace(drafter, trace.quality, [], None, (0.8, 0.7)).verdict


@pytest.fixture(scope="module")
def real():
    """The embedded pair, and text that its target writes."""
    try:
        model, tokenizer = load(str(embedded.target_path()))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    texts = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        texts.append((prompt, write_text(model, prompt, 40)))
    masks = likely_masks(tokenizer, 49152)
    return model, load_drafter(embedded.drafter_path(), dtype=mx.float32), texts, masks


BREAKS = {
    "target_layer_ids": (lambda d: variants.with_taps(d, 1, 30), "[1, 10, 19, 28]"),
    "candidate_selector": (variants.with_codebooks_swapped, "codebooks swapped"),
    "convolution": (variants.with_conv_sides_swapped, "two sides swapped"),
    "mask_token_id": (lambda d: variants.with_mask_id(d, 1000), "mask_token_id 4,"),
    "is_causal": (variants.with_causal_flipped, "is_causal [False, False]"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", BREAKS)
def test_each_fault_is_named(real, stage):
    model, drafter, texts, masks = real
    broken, change = BREAKS[stage]
    trace = bisect(model, broken(drafter), texts, masks)
    assert trace.verdict.startswith(f"verdict: {stage} is at fault"), list(trace.lines())
    # Untrained special tokens have embeddings alike: several may be named.
    assert change in trace.verdict


@pytest.mark.slow
def test_nothing_is_at_fault_with_the_pair_as_it_is(real):
    model, drafter, texts, masks = real
    trace = bisect(model, drafter, texts, masks, num_anchors=28)
    assert trace.verdict == "verdict: no stage is at fault"

"""A completion depends on its request and the weights only; versions are told per token; switches are whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nereus.backends.api import Completion, Interrupt, SampleRequest
from nereus.backends.torch.generate import GenerateEngine
from nereus.errors import TransitionError
from tests.backends import generate_models as models

request = models.request


def drain(engine: GenerateEngine) -> dict[str, Completion]:
    done = {}
    for _ in range(2000):
        if engine.idle:
            return done
        done.update({completion.id: completion for completion in engine.step()})
    raise AssertionError("the engine does not come to an end")


def alone(what: SampleRequest) -> Completion:
    engine = models.engine(slots=1)
    engine.submit(what)
    return drain(engine)[what.id]


def various(count: int) -> list[SampleRequest]:
    draw = random.Random(1)
    requests = []
    for number in range(count):
        prompt = (
            [draw.randrange(32) for _ in range(draw.choice([1, 2, 7, 7, 20]))] if number % 3 else [4, 8, 15, 16, 23]
        )
        temperature, top_p, top_k = draw.choice([(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 0.9, 6)])
        requests.append(
            request(
                f"r-{number}",
                prompt,
                group=number // 4,
                new=draw.choice([1, 3, 12, 30]),
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                stop_token_ids=draw.choice([(), (3,), (3, 9)]),
            )
        )
    return requests


def test_a_completion_does_not_depend_on_what_else_is_in_the_batch() -> None:
    requests = various(14)
    shuffled = random.Random(2).sample(requests, len(requests))
    engine = models.engine(slots=5)
    together: dict[str, Completion] = {}
    for late in shuffled:
        engine.submit(late)
        together.update({completion.id: completion for completion in engine.step()})
    together.update(drain(engine))
    assert together.keys() == {each.id for each in requests}
    for each in requests:
        single, batched = alone(each), together[each.id]
        assert batched.tokens.tolist() == single.tokens.tolist()
        assert batched.finish == single.finish
        np.testing.assert_allclose(batched.logprobs, single.logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_logprobs_are_those_of_the_model_with_logits_over_temperature(temperature: float) -> None:
    asked = request("a-0", new=20, temperature=temperature)
    got = alone(asked)
    expected = models.logprobs(0, asked.prompt, got.tokens, temperature)
    np.testing.assert_allclose(got.logprobs, expected.numpy(), rtol=0, atol=1e-6)


def test_samples_of_a_group_differ_and_share_one_prefill() -> None:
    engine = models.engine(slots=8)
    for index in range(8):
        engine.submit(request(f"g-{index}", new=12))
    done = drain(engine)
    assert len({tuple(completion.tokens) for completion in done.values()}) == 8
    assert (engine.counters.prefill_tokens, engine.counters.shared_tokens) == (4, 28)
    assert engine.counters.tokens == 96


def test_a_latecomer_takes_the_prompt_of_a_live_sibling() -> None:
    engine = models.engine()
    engine.submit(request("g-0", new=20))
    engine.step()
    engine.submit(request("g-1", new=20))
    done = drain(engine)
    assert engine.counters.prefill_tokens == 4
    assert done["g-1"].tokens.tolist() == alone(request("g-1", new=20)).tokens.tolist()


def test_the_stop_token_is_the_last_token() -> None:
    free = alone(request("a-0", new=30))
    stop = int(free.tokens[6])
    first = free.tokens.tolist().index(stop)
    stopped = alone(request("a-0", new=30, stop_token_ids=(stop, 31)))
    assert stopped.finish == "stop"
    assert stopped.tokens.tolist() == free.tokens.tolist()[: first + 1]


def test_length_and_context_end_a_completion() -> None:
    assert alone(request("a-0", new=3)).finish == "length"
    assert alone(request("a-0", [1] * 30, new=10)).finish == "length"
    cut = alone(request("a-0", [1] * 30, new=11))
    assert (cut.finish, len(cut.tokens)) == ("context", 10)


@pytest.mark.parametrize(
    ("prompt", "more", "named"),
    [
        ([], {}, "empty prompt"),
        ([1] * 40, {}, "40 tokens leaves no room in 40"),
        ([1, 32], {}, "outside the vocabulary of 32"),
        ([1, -1], {}, "outside the vocabulary"),
        ([1], {"new": 0}, "max_new_tokens"),
        ([1], {"temperature": 0.0}, "temperature > 0"),
        ([1], {"top_p": float("nan")}, "top_p"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(prompt: list[int], more: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        models.engine().submit(request("a-0", prompt, **more))


def test_an_id_is_served_once_at_a_time() -> None:
    engine = models.engine()
    engine.submit(request("a-0", new=2))
    with pytest.raises(ValueError, match="already"):
        engine.submit(request("a-0"))
    drain(engine)
    engine.submit(request("a-0"))


def test_cancelling_returns_what_was_drawn_and_leaves_the_others_alone() -> None:
    engine = models.engine(slots=3)
    for index in range(4):
        engine.submit(request(f"g-{index}", new=20))
    for _ in range(5):
        engine.step()
    gone, queued, unknown = (engine.cancel(name) for name in ("g-0", "g-3", "g-9"))
    assert gone is not None and queued is not None and unknown is None
    assert (gone.finish, len(gone.tokens), len(queued.tokens)) == ("aborted", 5, 0)
    done = drain(engine)
    assert done.keys() == {"g-1", "g-2"}
    for name, completion in done.items():
        assert completion.tokens.tolist() == alone(request(name, new=20)).tokens.tolist()


def switched(interrupt: Interrupt) -> tuple[GenerateEngine, dict[str, Completion]]:
    engine = models.engine(slots=3)
    for index in range(5):
        engine.submit(request(f"g-{index}", group=index, new=12 + index))
    done: dict[str, Completion] = {}
    for _ in range(5):
        done.update({completion.id: completion for completion in engine.step()})
    engine.offer(models.weights(1), 1, interrupt)
    done.update(drain(engine))
    return engine, done


def test_keep_goes_on_under_the_new_weights_on_the_old_cache() -> None:
    engine, done = switched("keep")
    assert done["g-0"].versions.tolist() == [0] * 5 + [1] * 7
    assert done["g-3"].versions.tolist() == [1] * 15
    fresh = models.logprobs(1, request("g-0").prompt, done["g-0"].tokens).numpy()
    np.testing.assert_allclose(
        done["g-3"].logprobs, models.logprobs(1, request("g-3").prompt, done["g-3"].tokens), atol=1e-6
    )
    assert np.abs(done["g-0"].logprobs[5:] - fresh[5:]).max() > 1e-3
    assert engine.counters.prefill_tokens == 8, "once under each version: an old cache is not shared"


def test_wait_finishes_what_is_live_and_admits_none_before() -> None:
    _, done = switched("wait")
    for name, completion in done.items():
        version = 0 if name in ("g-0", "g-1", "g-2") else 1
        assert set(completion.versions.tolist()) == {version}
        expected = models.logprobs(version, request(name).prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-6)


def test_abort_computes_the_cache_anew_and_keeps_the_prefix() -> None:
    _, done = switched("abort")
    for name in ("g-0", "g-1", "g-2"):
        got, prompt = done[name], request(name).prompt
        assert got.versions.tolist()[:6] == [0] * 5 + [1]
        np.testing.assert_allclose(got.logprobs[:5], models.logprobs(0, prompt, got.tokens)[:5], atol=1e-6)
        np.testing.assert_allclose(got.logprobs[5:], models.logprobs(1, prompt, got.tokens)[5:], atol=1e-6)


def test_how_many_were_in_flight_is_told() -> None:
    engine = models.engine(slots=3)
    assert engine.switch_if_due() == 0
    engine.submit(request("a-0"))
    engine.step()
    engine.offer(models.weights(1), 1, "wait")
    assert engine.switch_if_due() is None
    engine.offer(models.weights(2), 2, "keep")
    assert engine.switch_if_due() == 1
    assert engine.version == 2


def test_generating_without_weights_is_an_error() -> None:
    engine = GenerateEngine(models.SHAPE, slots=1, capacity=8, device=models.CPU, dtype=torch.float64)
    engine.submit(request("a-0"))
    with pytest.raises(TransitionError, match="no weights"):
        engine.step()


def test_logits_that_are_not_finite_are_an_error() -> None:
    engine = models.engine()
    broken = models.tensors(1)
    broken["model.norm.weight"][3] = float("nan")
    engine.offer(models.DecoderWeights(models.SHAPE, broken, models.CPU, torch.float64), 1, "keep")
    engine.submit(request("a-0"))
    with pytest.raises(TransitionError, match="version 1 are not finite for a-0"):
        engine.step()


def test_capacity_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context of 64"):
        models.engine(capacity=65)

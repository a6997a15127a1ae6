"""Measure what the server costs and brings, on the embedded pair in this process.

    python tools/server_speed.py overhead turns clients

Everything that is compared takes turns, and only ratios are printed that do not depend on what else
the machine does; their medians count.
"""

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlx_dflash2.blas.load import load_fast_blas

TOPICS = ("rivers", "bread", "clocks", "bees", "maps", "glass", "salt", "trees", "boats", "stars")


class Server:
    """The embedded pair's server, and its client.

    Args:
        words (str): Arguments of the command.
    """

    def __init__(self, *words: str):
        from mlx_dflash2.server.command import Service, check_arguments
        from mlx_dflash2.server.options import parse
        from mlx_dflash2.server.pair import PairProvider

        self.args = parse(["--port", "0", "--log-level", "WARNING", *words])
        check_arguments(self.args)
        self.provider = PairProvider(self.args)
        self.provider.load_default()
        self.service = Service(self.args, self.provider)

    def ask(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """Return the body of an answer."""
        data = json.dumps({"messages": messages} | fields).encode()
        headers = {"Content-Type": "application/json"}
        url = f"{self.service.http.url}/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return json.load(answer)


def user(text: str) -> dict[str, str]:
    """Return a message."""
    return {"role": "user", "content": text}


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds that a call took, and those of the processors."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - used


def overhead(trials: int, tokens: int) -> None:
    """Compare requests with calls of the library's `generate`, which answer the same."""
    from mlx_dflash2 import generate

    server = Server("--copy-drafts", "off", "--verify-width", "4")
    pair, wall, used = server.provider.pair, [], []
    best: dict[str, float] = {}
    for trial in range(trials):
        # A prompt that nothing is cached of but the template's first words.
        system = {"role": "system", "content": f"{trial}. You are a helpful assistant."}
        messages = [system, user(f"Tell me about {TOPICS[trial % len(TOPICS)]}.")]
        ids = pair.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        said: dict[str, str] = {}

        def library(ids: list[int] = ids, said: dict[str, str] = said) -> None:
            options = {"max_tokens": tokens, "verify_width": 4}
            said["library"] = generate(
                pair.model, pair.tokenizer, ids, draft_model=pair.proposer, **options
            )

        def request(messages: list[Any] = messages, said: dict[str, str] = said) -> None:
            answer = server.ask(messages, max_tokens=tokens)
            said["server"] = answer["choices"][0]["message"]["content"]
            assert answer["timings"]["cache_n"] < 8

        calls = [library, request] if trial % 2 else [request, library]
        found = {call.__name__: timed(call) for call in calls}
        assert said["library"] == said["server"]
        if trial:
            best = {
                name: min(best.get(name, seconds), seconds) for name, (seconds, _) in found.items()
            }
            wall.append(found["request"][0] / found["library"][0])
            used.append(found["request"][1] / found["library"][1])
    show("request / library, wall", wall)
    show("fastest request / fastest library call", [best["request"] / best["library"]])
    show("request / library, processor time", used)
    server.service.stop()


def turns(trials: int) -> None:
    """Compare the prompt work of the second turn of a conversation with the first's."""
    server, tokens, seconds = Server(), [], []
    for trial in range(trials):
        text = f"{trial}. " + " ".join(f"{topic} {i}," for i in range(23) for topic in TOPICS)
        first = server.ask([user(text)], max_tokens=8)
        said = first["choices"][0]["message"]
        second = server.ask([user(text), said, user("And what else?")], max_tokens=2)
        times = first["timings"], second["timings"]
        print(*((t["prompt_n"], t["cache_n"], round(t["prompt_ms"])) for t in times))
        tokens.append(times[1]["prompt_n"] / times[0]["prompt_n"])
        seconds.append(times[1]["prompt_ms"] / times[0]["prompt_ms"])
    show("second turn / first, prompt tokens read", tokens)
    show("second turn / first, time to the first token", seconds)
    server.service.stop()


def clients(trials: int, tokens: int) -> None:
    """Compare four requests at a time with one after the other, in tokens a second."""
    server, gains = Server("--prompt-cache-size", "1"), []

    def answer(text: str) -> int:
        return server.ask([user(text)], max_tokens=tokens)["usage"]["completion_tokens"]

    def together(texts: Sequence[str]) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            count = sum(pool.map(answer, texts))
        return count / (time.perf_counter() - start)

    def in_turn(texts: Sequence[str]) -> float:
        start = time.perf_counter()
        return sum(map(answer, texts)) / (time.perf_counter() - start)

    for trial in range(trials):
        texts = [f"{trial}: a story about {topic}, please." for topic in TOPICS[:4]]
        calls = [together, in_turn] if trial % 2 else [in_turn, together]
        rates = {call.__name__: call(texts) for call in calls}
        print({name: round(rate, 2) for name, rate in rates.items()})
        if trial:
            gains.append(rates["together"] / rates["in_turn"])
    show("4 clients together / in turn, tokens a second", gains)
    server.service.stop()


def show(name: str, ratios: list[float]) -> None:
    """Print a line."""
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"{name}: median {middle:.3f} ({low:.3f} to {high:.3f}) of {len(ratios)}", flush=True)


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("overhead", "turns", "clients"))
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    load_fast_blas()
    for what in args.what:
        if what == "overhead":
            overhead(args.trials, args.tokens)
        elif what == "turns":
            turns(args.trials)
        else:
            clients(args.trials, args.tokens)


if __name__ == "__main__":
    main()

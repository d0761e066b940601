"""How does a prompt become tokens, and how do tokens become text again?

Owner: rollout units. The model folder's own tokenizer and chat template are used, through transformers. What is sampled
stays tokens all the way to the trainer; text is made only for rewards and people.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.config import JobConfig
from nereus.errors import ConfigError


class ModelText:
    """The tokenizer of a model folder together with the job's prompt rules."""

    def __init__(self, model: Path, config: JobConfig) -> None:
        from transformers import AutoTokenizer  # takes seconds: only rollout units pay for it

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._data = config.data
        if self._data.chat and not self._tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer in {model} has no chat template",
                where="data.chat",
                remedy="set data.chat = false and data.template, or use a model with a chat template",
            )
        self.stop_token_ids = self._stops(model, config.rollout.stop)

    def encode(self, prompt: object) -> NDArray[np.int32]:
        """Return the prompt's token ids, int32 [T]; ``prompt`` is a string or a list of chat messages."""
        if self._data.chat:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if self._data.system:
                messages = [{"role": "system", "content": self._data.system}, *messages]  # type: ignore[misc]
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        elif isinstance(prompt, str):
            text = self._data.system + self._data.template.replace("{prompt}", prompt)
        else:
            raise ConfigError(
                "the data set holds chat messages",
                where="data.chat",
                remedy="set data.chat = true",
            )
        ids = self._tokenizer(text, add_special_tokens=not self._data.chat)["input_ids"]
        eos = self._tokenizer.eos_token_id
        if len(ids) > 1 and ids[-1] == eos:
            ids = ids[:-1]  # some tokenizers end every text; a prompt has not ended
        return np.array(ids, np.int32)

    def decode(self, tokens: NDArray[np.int32]) -> str:
        """Return the text of ``tokens`` without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def _stops(self, model: Path, strings: list[str]) -> tuple[int, ...]:
        """Collect the model's end-of-sequence tokens and the operator's stop strings; each must be one token."""
        stops: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            if (path := model / name).exists():
                value = json.loads(path.read_text()).get("eos_token_id")
                stops.update(value if isinstance(value, list) else [] if value is None else [value])
        if self._tokenizer.eos_token_id is not None:
            stops.add(self._tokenizer.eos_token_id)
        for string in strings:
            ids = self._tokenizer(string, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise ConfigError(
                    f"{string!r} is {len(ids)} tokens for this model",
                    where="rollout.stop",
                    remedy="use strings that are one token, or end completions by the reward's answer format",
                )
            stops.add(ids[0])
        return tuple(sorted(stops))

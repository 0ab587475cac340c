"""From prompts to token ids; a prompt is never cut: what is left would be another problem."""

import logging
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer

from rollverify.data.prompts import Prompt, PromptSet
from rollverify.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedText:
    """A prompt with its ids."""

    prompt: Prompt
    place: str
    token_ids: tuple[int, ...]
    """Ids of `prompt.text`, one at least."""


def encode_prompts(
    prompt_set: PromptSet,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    *,
    long_prompts: Literal["error", "drop"] = "error",
) -> list[EncodedText]:
    """Token ids of every prompt, 1..max_prompt_tokens each; no special token is added (no BOS).

    Special tokens that the text itself spells out, as a chat template does, become their ids. A
    prompt with no token, or a character the tokenizer does not know, is a DataError.
    """
    encoded: list[EncodedText] = []
    dropped: list[str] = []
    max_characters = max_prompt_tokens * max(map(len, tokenizer.get_vocab()))
    for prompt, place in zip(prompt_set.prompts, prompt_set.places, strict=True):
        if len(prompt.text) > max_characters:  # tokenising it could take minutes
            if long_prompts == "error":
                raise DataError(
                    f"{place}: the prompt has {len(prompt.text)} characters, too many for "
                    f"rollout.max_prompt_tokens = {max_prompt_tokens}; raise that, drop the line, "
                    "or set data.long_prompts = 'drop'"
                )
            dropped.append(place)
            continue
        ids = _ids_of(prompt, place, tokenizer)
        if len(ids) <= max_prompt_tokens:
            encoded.append(EncodedText(prompt=prompt, place=place, token_ids=tuple(ids)))
        elif long_prompts == "error":
            raise DataError(
                f"{place}: the prompt has {len(ids)} tokens, more than "
                f"rollout.max_prompt_tokens = {max_prompt_tokens}; raise that, drop the line, or "
                "set data.long_prompts = 'drop'"
            )
        else:
            dropped.append(place)
    if not encoded:
        raise DataError(
            f"{dropped[0]}: this and all other prompts have more than rollout.max_prompt_tokens = "
            f"{max_prompt_tokens} tokens; raise that"
        )
    if dropped:
        logger.warning(
            "%d of %d prompts have more than %d tokens and are dropped (data.long_prompts), the "
            "first is %s",
            len(dropped),
            len(prompt_set.prompts),
            max_prompt_tokens,
            dropped[0],
        )
    return encoded


def _ids_of(prompt: Prompt, place: str, tokenizer: Tokenizer) -> list[int]:
    try:
        ids = tokenizer.encode(prompt.text, add_special_tokens=False).ids
    except Exception as error:  # `tokenizers` raises the bare class, e.g. for unknown characters
        raise DataError(
            f"{place}: the tokenizer cannot encode the prompt ({error}); "
            "use only characters of the model's vocabulary"
        ) from error
    if not ids:
        raise DataError(f"{place}: the prompt gives no token; write a prompt or drop the line")
    return ids

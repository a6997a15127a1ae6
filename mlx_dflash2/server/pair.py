"""The pair that is served, and the names that requests may call it by."""

from pathlib import Path
from typing import Any

from mlx_lm.server import ModelProvider

from ..cli.build import read_pair
from ..decode.batch.caches import check_batchable, check_rotation
from ..decode.rollback import drops_rows
from ..pairs.find import find_pair
from ..pairs.known import model_name
from ..pairs.load import Pair
from ..targets import Target, bind
from .errors import ApiError

DEFAULT_MODEL = "default_model"
# What drafts where there is no drafter.
COPIES = "copies"


class PairProvider(ModelProvider):
    """Loads one target with its drafter, before the first request; requests load nothing.

    Args:
        cli_args (argparse.Namespace): The command's arguments.

    Attributes:
        pair (Pair): The pair, once :meth:`load_default` has run.
        target (Target): The target, bound.
        trims (bool): Whether all of the target's caches can always be trimmed.
        one_at_a_time (str, optional): Why requests cannot share a batch, if they cannot.
    """

    # In the base class they are None until a model is loaded.
    model: Any
    tokenizer: Any
    draft_model: Any
    model_key: Any
    pair: Pair
    target: Target

    def load_default(self) -> None:
        """Load the pair, unless it is loaded."""
        if self.model_key is None:
            self._load(self.cli_args.model, self.cli_args.adapter_path, self.cli_args.draft_model)

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        """Return the target and its tokenizer."""
        self.load_default()
        return self.model, self.tokenizer

    def _load(
        self,
        model_path: str | None,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        args = self.cli_args
        sources = find_pair(
            model_path,
            draft_model_path,
            revision=args.revision,
            draft_bits=args.draft_bits,
            block_size=args.block_size,
            verify_width=args.verify_width,
            copy_drafts=args.copy_drafts,
        )
        self.pair = read_pair(sources, args, self._tokenizer_config)
        self.model, self.tokenizer = self.pair.model, self.pair.tokenizer
        if args.use_default_chat_template and self.tokenizer.chat_template is None:
            self.tokenizer.chat_template = self.tokenizer.default_chat_template
        self.draft_model, self.target = self.pair.proposer, bind(self.pair.model)
        draft_name = COPIES if sources.draft_model is None else sources.draft_model.name
        self.model_key = (sources.target.name, adapter_path, draft_name)
        self.one_at_a_time = _one_at_a_time(self.target, args.kv_bits)
        self.trims = all(drops_rows(cache) for cache in self.target.make_cache())
        self.names = _names(sources.target.name)
        self.draft_names = _names(draft_name)

    @property
    def name(self) -> str:
        """The target's name in answers."""
        return self.names[0]

    @property
    def context_length(self) -> int | None:
        """Tokens that the target was made for; ``None`` if it does not say."""
        args: Any = getattr(self.model, "args", None)
        text_config = getattr(args, "text_config", None)
        found = getattr(args, "max_position_embeddings", None)
        if found is None and isinstance(text_config, dict):
            found = text_config.get("max_position_embeddings")
        return found if isinstance(found, int) else None

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model.

        Raises:
            ApiError: with the names of this one.
        """
        if name is not None and name not in (*self.names, DEFAULT_MODEL):
            raise ApiError(
                404,
                f"The model {name!r} is not served; this server has {self.name!r}.",
                param="model",
                code="model_not_found",
            )


def _names(path: str) -> tuple[str, ...]:
    """A model's names: its repository, or for a folder its last part; then its paths."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return (path, model_name(path))
    return (model_name(path), path, str(folder.resolve()))


def _one_at_a_time(target: Target, kv_bits: int | None) -> str | None:
    if kv_bits is not None:
        return "the key-value cache is quantized (--kv-bits)"
    try:
        check_batchable([target.make_cache()])
        check_rotation(target.model)
    except ValueError as error:
        return str(error)
    return None

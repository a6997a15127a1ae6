"""Proposers whose copies are known: the text to copy from was planted into the index."""

from mlx_dflash2.copies import MAX_DRAFTS, CopyIndex, CopyProposer
from support.tiny import VOCAB


class Planted(CopyProposer):
    """Copies from texts that stand before position 0, each for one sequence in turn.

    Every ``wrong``-th token of a text is another one, so that copies are right up to there.
    """

    def __init__(self, *texts, drafter=None, wrong=None, vocab=VOCAB, max_drafts=MAX_DRAFTS):
        super().__init__(drafter, max_drafts)
        self.texts = [
            [(t + 1) % vocab if wrong and i % wrong == wrong - 1 else t for i, t in enumerate(text)]
            for text in texts
        ]
        self.made = 0

    def make_context(self):
        context = super().make_context()
        text = self.texts[self.made % len(self.texts)]
        self.made += 1
        context.index, context.start = CopyIndex(text), -len(text)
        return context


class Watched(CopyProposer):
    """Keeps the contexts that it made."""

    def __init__(self, drafter=None, **kwargs):
        super().__init__(drafter, **kwargs)
        self.contexts = []

    def make_context(self):
        self.contexts.append(super().make_context())
        return self.contexts[-1]

"""Scores of translations against all references of their source.

Hypotheses and references are sentences as in a Corpus: lower-case tokens joined by spaces.
"""
from pyops.errors import UserError


def exact_match(hypotheses, references_list):
    """Return the fraction, 0 to 1, of hypotheses that equal one of their references.

    `references_list[i]` is the list of references of `hypotheses[i]`.
    """
    _check(hypotheses, references_list)
    return sum(hypothesis in references for hypothesis, references
               in zip(hypotheses, references_list, strict=True)) / len(hypotheses)


def bleu(hypotheses, references_list):
    """Return sacrebleu's corpus BLEU, 0 to 100, computed on the given tokens.

    `references_list[i]` is the list of references of `hypotheses[i]`; the lists may differ in length.
    UserError if sacrebleu is not installed.
    """
    _check(hypotheses, references_list)
    try:
        import sacrebleu
    except ImportError as error:
        raise UserError("sacrebleu is not installed: install it with: pip install sacrebleu") from error
    most = max(map(len, references_list))
    columns = [[references[k] if k < len(references) else None for references in references_list]
               for k in range(most)]
    # force: suppresses sacrebleu's warning about tokenised input.
    return sacrebleu.corpus_bleu(hypotheses, columns, tokenize='none', force=True).score


def _check(hypotheses, references_list):
    if len(hypotheses) != len(references_list):
        raise ValueError(f'{len(hypotheses)} hypotheses and {len(references_list)} lists of references')
    if not hypotheses:
        raise UserError('no sentences to score; hold some out of training, or give a larger corpus')
    if not all(references_list):
        raise ValueError('a hypothesis has no reference')

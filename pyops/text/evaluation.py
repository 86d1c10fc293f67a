"""Evaluation of a translator on sentences held out from its training: raw text in and out, scored by sacrebleu.

    sources, references = test_set(corpus, fraction)
    report = evaluate(pyops.load('ckpt').translate(sources), sources, references)
"""
from pyops.errors import UserError
from pyops.text.split import hold_out, joined
from pyops.text.vocabulary import SPECIALS, UNK

LENGTHS = (4, 8, 12, 20)        # upper limits of the groups of source lengths in words; the last group is longer
PARTS = 'test', 'validation'


def test_set(corpus, fraction, part='test', excluded=None):
    """Return sources and lists of their references, raw text, of a part of a corpus; and the number of its sources left out.

    fraction: the share that was held out of the training;  excluded: the pairs excluded from it, as in hold_out
    A source is left out if one of its references occurs in the training part, as the translation of another source, in any
    case and spacing.  References keep their order in the corpus and are distinct.
    UserError if no source is left.
    """
    training, *held_out = hold_out(corpus, fraction, excluded)
    chosen = held_out[{'validation': 0, 'test': 1}[part]]
    known, pairs = set(training.targets), chosen.texts()
    seen = {source for (source, _), tokens in zip(pairs, chosen.targets, strict=True) if tokens in known}
    references = joined(pairs)
    disjoint = {source: targets for source, targets in references.items() if source not in seen}
    if not disjoint:
        raise UserError(f'{corpus.name}: all {len(references)} {part} sentences have a translation that occurs in training; '
                        'hold out more')
    return list(disjoint), list(disjoint.values()), len(references) - len(disjoint)


def check():
    """Raise UserError if sacrebleu, which evaluate() needs, is missing: call it before translating."""
    _sacrebleu()


def evaluate(hypotheses, sources, references):
    """Return the scores of translations as a dict for JSON.

    hypotheses, sources: raw text;  references[i]: list of the references of source i
    'one_reference' compares with the first reference of each source, 'all_references' with all; both have BLEU and chrF of
    sacrebleu (0 to 100) with signatures, and the share of exact matches, whatever the kind of white space.  'by_length': the
    scores against one reference for groups of sources by their number of words.  'unknown': the share of translations with
    an unknown word.
    """
    if not len(hypotheses) == len(sources) == len(references):
        raise ValueError(f'{len(hypotheses)} hypotheses, {len(sources)} sources and {len(references)} lists of references')
    first = [[some[0]] for some in references]
    groups, least = [], 1
    lengths = [len(source.split()) for source in sources]
    for most in (*LENGTHS, max(lengths, default=0)):
        chosen = [i for i, length in enumerate(lengths) if least <= length <= most]
        if chosen:
            scores = _scores([hypotheses[i] for i in chosen], [first[i] for i in chosen])
            groups.append(dict(words=[least, most], sentences=len(chosen),
                               **{name: scores[name] for name in ('bleu', 'chrf', 'exact')}))
        least = max(least, most + 1)
    return dict(sentences=len(sources), references=sum(map(len, references)),
                unknown=sum(SPECIALS[UNK] in text for text in hypotheses) / len(hypotheses),
                one_reference=_scores(hypotheses, first), all_references=_scores(hypotheses, references), by_length=groups)


def _scores(hypotheses, references):
    sacrebleu = _sacrebleu()
    columns = [[some[k] if k < len(some) else None for some in references] for k in range(max(map(len, references)))]
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    return dict(bleu=bleu.corpus_score(hypotheses, columns).score, chrf=chrf.corpus_score(hypotheses, columns).score,
                exact=sum(_plain(text) in map(_plain, some)
                          for text, some in zip(hypotheses, references, strict=True)) / len(hypotheses),
                bleu_signature=str(bleu.get_signature()), chrf_signature=str(chrf.get_signature()))


def bleu(hypotheses, references):
    """Return BLEU against the first reference of each sentence, 0 to 100."""
    return _sacrebleu().BLEU().corpus_score(hypotheses, [[some[0] for some in references]]).score


def _plain(text):
    """Return a text with one plain space for each white space: the corpus has five kinds before ! and ?."""
    return ' '.join(text.split())


def _sacrebleu():
    try:
        import sacrebleu
    except ImportError as error:
        raise UserError("sacrebleu is not installed: install it with: pip install sacrebleu") from error
    return sacrebleu


def text(report):
    """Return the lines about a report of `evaluate`."""
    lines = []
    if 'beam' in report:                                        # pyops.text.serving adds it
        lines.append('greedy decoding' if report['beam'] == 1 else
                     f'beam search    : beam {report["beam"]}, length penalty {report["length_penalty"]:g}')
    for name, key in (('one reference', 'one_reference'), ('all references', 'all_references')):
        scores = report[key]
        lines += [f'{name:15}: BLEU {scores["bleu"]:5.2f}   chrF {scores["chrf"]:5.2f}   exact {scores["exact"]:.1%}',
                  f'{"":15}  {scores["bleu_signature"]}', f'{"":15}  {scores["chrf_signature"]}']
    lines += [f'unknown words  : in {report["unknown"]:.1%} of the translations', '',
              'words of the source   sentences    BLEU    chrF   exact']
    for group in report['by_length']:
        words = '{}-{}'.format(*group['words'])
        lines.append(f'{words:>19} {group["sentences"]:>11} {group["bleu"]:>7.2f} {group["chrf"]:>7.2f} {group["exact"]:>7.1%}')
    return '\n'.join(lines)

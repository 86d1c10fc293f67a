"""Train a word-level LSTM language model (Zaremba et al. 2014, arXiv:1409.2329) on text, and let it write.

    python examples/word_lstm.py                        sentences of the embedded corpus, a few seconds
    python examples/word_lstm.py ptb -e 10 --hidden 200     the folder ptb has train.txt, valid.txt and test.txt
"""
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # this source tree, from any current folder

from pyops import flags, nn, optim
from pyops import functional as F
from pyops.autograd import Tensor, no_grad
from pyops.data import WordCorpus
from pyops.data.words import END, batchify
from pyops.errors import exits_cleanly
from pyops.text import embedded


class LanguageModel(nn.Module):
    """logits (T, B, words), state = model(ids (T, B), state or None)"""

    def __init__(self, words, hidden=64, layers=2, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout)
        self.output = nn.Linear(hidden, words)

    def forward(self, ids, state=None):
        h, state = self.lstm(self.dropout(self.embedding(ids)), state)
        return self.output(self.dropout(h)), state


def losses_of(model, pieces):
    """Yield the loss of each piece of a text: (ids (T, B), the ids one step later).  The state goes from piece to piece,
    without its history: gradients reach back T steps."""
    state = None
    for ids, later in pieces:
        logits, state = model(ids, state)
        state = tuple(one.detach() for one in state)
        yield F.cross_entropy(logits.reshape(-1, logits.shape[-1]), later.reshape(-1))


def train(model, optimizer, pieces):
    """Take a step per piece and return the losses."""
    losses = []
    for loss in losses_of(model, pieces):
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_optimizer(model, lr):
    return optim.Adam(model.parameters(), lr)


def pieces_of(ids, batch_size, steps):
    """Return [(ids (T, B), the ids one step later)] of a text in batch_size columns, T = steps, fewer in the last."""
    rows = batchify(ids, batch_size)
    return [(Tensor(rows[t:t + steps][:len(rows) - 1 - t]), Tensor(rows[t + 1:t + 1 + steps]))
            for t in range(0, len(rows) - 1, steps)]


def perplexity(model, pieces):
    model.eval()
    with no_grad():
        losses = [loss.item() for loss in losses_of(model, pieces)]
    model.train()
    return math.exp(np.average(losses, weights=[ids.size for ids, _ in pieces]))


def write(model, corpus, words, rng):
    """Return a text of `words` words drawn from the model."""
    model.eval()
    ids, state = [corpus.words.index(END)], None
    with no_grad():
        for _ in range(words):
            logits, state = model(Tensor([[ids[-1]]]), state)
            ids.append(rng.choice(len(corpus), p=F.softmax(logits.double()).numpy()[0, 0]))
    return ' '.join(corpus.decode(ids[1:])).replace(f' {END}', '.')


def corpus_of(folder):
    """Return the corpus in `folder`, or the embedded sentences; every tenth is for validation."""
    if folder:
        return WordCorpus(folder)
    lines = list(embedded.corpus().sources)[:2000]
    return WordCorpus.of('\n'.join(line for i, line in enumerate(lines) if i % 10), '\n'.join(lines[::10]))


def main(argv=None):
    p = flags.ArgumentParser(prog='word_lstm.py', description='Train an LSTM language model on words.')
    p.add_argument('folder', nargs='?', help='a folder with train.txt and valid.txt (default: the embedded corpus)')
    p.add_argument('-e', '--epochs', type=flags.int_up_to(1000), default=4, metavar='N', help='default %(default)s')
    p.add_argument('-b', '--batch-size', type=flags.int_up_to(4096), default=16, metavar='N', help='default %(default)s')
    p.add_argument('-l', '--lr', type=flags.positive_float, default=0.01, help='learning rate (default %(default)s)')
    p.add_argument('--hidden', type=flags.int_up_to(4096), default=64, metavar='N', help='units (default %(default)s)')
    p.add_argument('--dropout', type=flags.fraction, default=0.0, metavar='P', help='default %(default)s')
    args = p.parse_args(argv)
    corpus = corpus_of(args.folder)
    training, valid = (pieces_of(ids, args.batch_size, 20) for ids in (corpus.train, corpus.valid))
    model = LanguageModel(len(corpus), args.hidden, dropout=args.dropout)
    optimizer = make_optimizer(model, args.lr)
    for epoch in range(args.epochs):
        loss = np.mean(train(model, optimizer, training))
        print(f'epoch {epoch + 1} loss : {loss:.4f}  perplexity : {perplexity(model, valid):.2f}', flush=True)
    print(write(model, corpus, 30, np.random.default_rng(0)))


if __name__ == '__main__':
    with exits_cleanly('word_lstm.py'):
        main()

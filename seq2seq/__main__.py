"""List the programs of this package."""
from pyops.flags import list_programs

if __name__ == '__main__':
    list_programs('seq2seq', 'A deep GRU that translates English to French.', {
        'train': 'train, go on with a checkpoint, or serve one',
        'translate': 'translate with a checkpoint',
        'evaluate': 'score a checkpoint: BLEU, chrF',
        'average': 'average checkpoints of a run',
    })

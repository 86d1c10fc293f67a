"""List the programs of this package."""
from pyops.flags import list_programs

if __name__ == '__main__':
    list_programs('transformer', 'A transformer that translates English to French.', {
        'train': 'train, resume a checkpoint, or serve one',
        'translate': 'translate with a checkpoint',
        'evaluate': 'score a checkpoint: BLEU, chrF',
        'average': 'average checkpoints of a run',
        'from_marian': 'convert a model of Marian',
    })

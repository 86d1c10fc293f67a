"""List the programs of this package."""
from pyops.flags import list_programs

if __name__ == '__main__':
    list_programs('mnist', 'Classifiers of handwritten digits.', {
        'train': 'train a 784-30-10 network; gradients by hand',
        'resnet': 'train a residual network; gradients from the tape',
    })

"""The mutable state of the backend: the current device, the open GPU, and the hooks of a recording plan."""
import contextlib
import threading

device = None           # the current device, on which `empty`, `zeros` and `put` make arrays; the CPU unless `use` changes it
gpu = None              # the open GPU, if any; it runs the kernels that receive its arrays

# Hooks, None unless a plan records.  They apply to the device that was current when they were installed, and to launches and
# allocations of the thread that installed them: other threads, such as the workers of a DataLoader, run as without hooks.
hooked_device = None
hooked_thread = None
on_allocate = None      # on_allocate(shape, dtype, name, kind) returns the arrays of `empty`
on_launch = None        # on_launch(name, values) receives each launch and returns whether to run it now
on_note = None          # on_note(...) receives the arguments of note_product
on_call = None          # on_call(name, function, inputs, outputs) receives each `call` and returns whether to run it now
_hooking = threading.RLock()        # held while hooks are installed: two threads cannot record at the same time


@contextlib.contextmanager
def hooks(allocate=None, listen=None, note=None, call=None):
    """Install hooks inside the block: allocate(shape, dtype, name, kind) returns the arrays of `empty`, listen(name, values)
    returns whether a launch runs, note(...) receives the arguments of `note_product`, and call(...) returns whether a `call`
    runs.  None keeps the current hook.  Waits while another thread has hooks."""
    global hooked_device, hooked_thread, on_allocate, on_launch, on_note, on_call
    with _hooking:
        before = hooked_device, hooked_thread, on_allocate, on_launch, on_note, on_call
        hooked_device, hooked_thread, on_allocate, on_launch, on_note, on_call = (
            device, threading.get_ident(), allocate or on_allocate, listen or on_launch, note or on_note, call or on_call)
        try:
            yield
        finally:
            hooked_device, hooked_thread, on_allocate, on_launch, on_note, on_call = before


@contextlib.contextmanager
def without_hooks():
    """Remove the hooks inside the block, in which no plan records.  Without effect if they belong to another thread."""
    global on_allocate, on_launch, on_note, on_call
    if not in_hooked_thread():
        yield
        return
    before = on_allocate, on_launch, on_note, on_call
    on_allocate = on_launch = on_note = on_call = None
    try:
        yield
    finally:
        on_allocate, on_launch, on_note, on_call = before


def in_hooked_thread():
    """Return whether the hooks, if there are any, apply to the current thread."""
    return hooked_thread == threading.get_ident()

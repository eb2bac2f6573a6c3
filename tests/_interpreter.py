"""Triton's interpreter without what it does over and over: it computes what it did, in half the time.

At every launch, and again at every call of one @triton.jit function by another, it looks through the members of
triton.language for those to replace. For every value that it makes it lists the types of numbers, and puts together
the value's type and shape, anew.
"""

import functools
import inspect
import os
import threading


def quicken():
    """Look for the members once, replace them once a launch, and make each type but once.

    A Triton whose interpreter is built otherwise is left as it is.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("_patch_lang", "_patch_builtin", "_patch_attr", "_LangPatchScope", "_get_np_dtype")
    if any(not hasattr(interpreter, name) for name in names):
        return
    replace, running = interpreter._patch_lang, threading.local()

    @functools.cache
    def builtins(pkg):
        return [(name, member) for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]

    for pkg in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins(pkg)  # now, while none is replaced

    def patch_builtin(pkg, builder, scope):
        for name, member in builtins(pkg):
            if getattr(pkg, name) is member:
                interpreter._patch_attr(pkg, name, member, builder, scope)

    class Launch(interpreter._LangPatchScope):
        def restore(self):
            running.langs = ()
            super().restore()

    def patch_lang(fn):
        langs = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if langs and all(lang in getattr(running, "langs", ()) for lang in langs):
            return Within()
        scope = replace(fn)
        running.langs = langs
        return scope

    Within, interpreter._LangPatchScope = interpreter._LangPatchScope, Launch
    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin
    any_type, number = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type_: (number if type(type_) is tl.dtype else any_type)(type_)
    _remember(tl)


def _remember(tl):
    """Give a block's type, and a value of some type, what the first one of its kind was given."""
    of_block, of_tensor, blocks = tl.block_type.__init__, tl.tensor.__init__, {}

    def init_block(self, element_ty, shape):
        if type(element_ty) is not tl.dtype:  # a pointer
            return of_block(self, element_ty, shape)
        key = element_ty.name, *shape
        if key in blocks:
            self.__dict__.update(blocks[key])
        else:
            of_block(self, element_ty, shape)
            blocks[key] = self.__dict__

    def init_tensor(self, handle, type):
        if "_of_tensors" in type.__dict__:
            self.__dict__.update(type._of_tensors, handle=handle, type=type)
        else:
            of_tensor(self, handle, type)
            type._of_tensors = {k: v for k, v in self.__dict__.items() if k not in ("handle", "type")}

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor

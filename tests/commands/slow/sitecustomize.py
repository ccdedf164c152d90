"""Slow down the reading of weights in every process with this folder on its path: each tensor takes SLOW_READ_S."""

import importlib.abc
import importlib.machinery
import os
import sys
import time

_MODULE = "sarathi_pp.checkpoint.stored_tensor"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        read = module.StoredTensor.read

        def slow(self):
            time.sleep(float(os.environ["SLOW_READ_S"]))
            return read(self)

        module.StoredTensor.read = slow


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())

"""TRAK data attribution as pure functions over arrays and HDF5 artifacts.

Importing this package is cheap on purpose: every start of Snakemake imports it, so torch, numba
and h5py come in with the modules that use them.
"""

__version__ = "0.1.0"

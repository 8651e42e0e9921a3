"""The Triton kernels, one op per file.

Owns kernels and their launchers; the wrappers in `kernels` import them for tensors on CUDA. Rules. Nothing here is imported on
a CPU path, but variants.py and sizes.py, which are arithmetic: importing Triton takes a second. A launcher trusts its arguments
and never looks at values on the device: grids follow from shapes alone, so that a captured launch stays right for other
lengths, and a program without work exits early. Arithmetic is in float32; operands of a dot are cast to COMPUTE first. Offsets
into the pool are 64 bit. May import triton, torch and the modules of kernels that are in no folder.

These kernels have been run in Triton's interpreter and compiled for sm_90; they have not run on a device.
"""

"""The Triton kernels, one op per file: kernel and launcher. The wrappers in `kernels` import them for tensors on CUDA.

Rules. Nothing here is imported on a CPU path: importing Triton takes a second. A launcher trusts its arguments and never
looks at values on the device: grids follow from shapes alone, so that a captured launch stays right for other lengths,
and blocks and tables a program has no use for are left by an early exit. Arithmetic is in float32; what goes into a dot is
cast to COMPUTE first. Offsets into the pool are 64 bit.

These kernels have been run in Triton's interpreter and compiled for sm_90; they have not run on a device.
"""

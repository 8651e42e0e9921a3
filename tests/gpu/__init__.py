"""`make gpu-check`: checks that need a CUDA device, part by part, with a file and a table of results."""

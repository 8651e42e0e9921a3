"""`make gpu-check`: what can only be shown on a CUDA device, part by part, with a file and a table of what was found."""

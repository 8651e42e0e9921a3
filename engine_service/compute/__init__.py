"""What runs in the worker thread, with torch: one step's forward pass, sampling and log probabilities."""

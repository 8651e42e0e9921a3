"""What both services, the client and the command line stand on. It knows none of them."""

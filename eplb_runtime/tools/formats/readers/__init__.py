"""One file a kind of file: what is in it, whoever wrote it. Nothing here unpickles objects or runs what a file says."""

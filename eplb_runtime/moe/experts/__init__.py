"""What moves when an expert moves: its rows of parameters, optimizer state and, where asked for, gradients."""

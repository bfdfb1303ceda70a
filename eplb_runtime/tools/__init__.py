"""What commands do outside of training: simulate, verify, doctor, bubbles, engines' formats, benchmarks."""

"""What commands do beside training: simulate, verify, doctor, bubbles, engines' formats, benchmarks."""

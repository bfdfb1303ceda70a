"""From a model to a running balancer, the same for all hosts: checks, sharding, the contract a host fills."""

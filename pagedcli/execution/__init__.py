"""Running step plans: real models on a device, or a cost model on a virtual clock. Knows nothing of requests."""

"""What runs the directory: TransferQueue's controller, by a sampler sent to it, or a thread of the bootstrapper."""

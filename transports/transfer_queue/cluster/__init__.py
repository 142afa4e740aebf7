"""The actors of a TransferQueue in a Ray cluster: starting, finding and stopping them."""

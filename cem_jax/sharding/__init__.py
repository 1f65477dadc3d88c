"""The device mesh, and how every array is split over it."""

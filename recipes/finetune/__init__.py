"""Fine-tuning of real weights on real data that packages bring along: nothing is downloaded at run time."""

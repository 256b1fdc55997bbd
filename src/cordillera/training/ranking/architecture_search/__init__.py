"""Search for the architecture of a ranking model.

Source: Rankitect (arXiv 2311.08430) compares searches by samples, by shared weights and by gradients in one space. Its
blocks and budgets are not published; those here are of NASRec (arXiv 2207.07187) and of this package's models.
"""

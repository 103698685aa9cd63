"""Whether a model that is split over ranks is still the same model: what is compared, and the verdict.

``measured`` runs the ranks of one size, ``comparison`` and ``findings`` are pure functions on what they
tell, ``tolerances`` says what is good enough, and ``report`` shows it. None of them knows Ray.
"""

"""Published planners on the planning problem, each with its paper's cost model, also where that is wrong.

What a planner predicts is comparable with its own predictions alone; :mod:`runner.plan.planners.choose` judges answers.
"""

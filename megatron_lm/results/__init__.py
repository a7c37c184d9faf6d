"""What users look at: ``get_result`` and ``report`` print and summarise a run, ``picture`` draws its
schedule, ``plan_run_compare`` compares a measured run with FASOP's prediction.
"""

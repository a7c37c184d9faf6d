// Runs the page's main function, and shows an error in place of an empty page.

main().catch(error => {
  document.getElementById("page").textContent = `The page can't show its data: ${error.message}. It needs a browser of 2024 or later.`;
  throw error;
});

-- Removing, and finding out what became of a mutation.

-- Adds a row's cells to those that die; returns the row's homes. `homes`: slot key -> homes of rows of that slot alone.
local function collect(P, dead, cells, homes)
  local key, index = one_piece(cells)
  if key then
    local spots = dead[key]
    if spots then spots[#spots + 1] = index else dead[key] = { index } end
    homes[key] = homes[key] or { home_of(P, key) }
    return homes[key]
  end
  local pieces = pieces_of(cells)
  for _, piece in ipairs(pieces) do
    local spots = dead[piece[1]]
    if spots then spots[#spots + 1] = piece[2] else dead[piece[1]] = { piece[2] } end
  end
  return homes_of(P, pieces)
end

-- Which claims hold rows: {task -> {position -> claim or false}}.
local function claims_of(P, rids)
  local by_task = {}
  for task = 1, P.nt do by_task[task] = hmget(P.K .. 'k:' .. task, rids) end
  return by_task
end

local function holds(claims, by)
  for i = 1, #claims do if claims[i] == by then return true end end
  return false
end

-- The first id whose claim is not its holder's any more, if there is one. rows: rid -> its position in by_task.
local function lost_claim(P, ids, rids, claims, by_task, rows)
  for j = 1, #ids do
    local mine, rid = claims[j], rids[j]
    if mine and rid then
      local at, good = rows[rid], false
      for task = 1, P.nt do
        local by = by_task[task][at]
        good = good or (by and holds(mine, by))
      end
      if not good then return j end
    elseif mine then
      for _, claim in ipairs(mine) do
        if redis.call('SISMEMBER', P.K .. 'l:' .. claim, ids[j]) == 1 then return j end -- gone, but it was somebody else's by then
      end
    end
  end
  return nil
end

-- Rows leave the claims that hold them.
local function settle_claims(P, rids, by_task)
  local K, gone = P.K, {}
  for task, held in ipairs(by_task) do
    local any = false
    for j = 1, #rids do
      if held[j] then gone[held[j]] = (gone[held[j]] or 0) + 1; any = true end
    end
    if any then many('HDEL', K .. 'k:' .. task, rids) end
  end
  for claim, count in pairs(gone) do
    lose(K, claim, head_of(K, claim), count)
  end
end

-- Payload: {ids, claims per id or false, rids or false; a rid per id or false}. Another rid than the one meant is as good as gone.
local function clear(K, P, args)
  if not P then return { OK, pack({ 0, {} }) }, false end
  local a = unpack_(args[4])
  local ids, claims, meant = a[1], a[2], a[3]
  expire(P)
  local found = hmget(K .. 'i', ids)
  if meant then
    for j, rid in ipairs(meant) do if rid and found[j] ~= rid then found[j] = false end end
  end
  local rids, names, seen = {}, {}, {}
  for j, rid in ipairs(found) do
    if rid and not seen[rid] then
      rids[#rids + 1], names[#names + 1] = rid, ids[j]
      seen[rid] = #rids
    end
  end
  local by_task = claims_of(P, rids)
  local wrong = claims and lost_claim(P, ids, found, claims, by_task, seen)
  if wrong then return { ERROR, pack({ 'lost', wrong }) } end
  if #rids == 0 then return { OK, pack({ 0, {} }) }, false end
  settle_claims(P, rids, by_task)
  local rows, dead, groups, group_names, known, leaving, homes_at = {}, {}, {}, {}, {}, {}, {}
  for j, blob in ipairs(load_rows(K, rids)) do
    local row = unpack_(blob)
    rows[j], group_names[j], known[row[ID]] = row, row[GROUP], false
  end
  load_groups(P, group_names, groups, known)
  for j, row in ipairs(rows) do
    local name, homes = row[GROUP], collect(P, dead, row[CELLS], homes_at)
    local g = groups[name]
    if g then
      count_row(g, row, homes, -1)
      if row[ID] == name then g[OWN] = false end
      leaving[name] = leaving[name] or { {}, 0 }
      leaving[name][1][rids[j]], leaving[name][2] = true, leaving[name][2] + 1
    elseif row[COMMITTED] ~= 2 and row[FAILED] ~= 1 then -- it was a group of its own
      count_whole(P, join_homes(homes), -1)
    end
    P.bytes = P.bytes - row[BYTES]
  end
  for name, left in pairs(leaving) do leave(P, groups[name], name, left[1], left[2]) end
  P.gone = P.gone + #rids
  moves(P)
  many('HDEL', K .. 'i', names)
  remove_rows(K, rids)
  save_groups(P, groups)
  untouch(P, rids, rows, groups, by_task)
  save(P)
  local freed = {}
  for key, spots in pairs(dead) do freed[#freed + 1] = { key, spots } end
  return { OK, pack({ #rids, freed }) }, true
end

local function drop(K, P)
  if not P then return { OK, pack({}) }, false end
  local dead, freed, homes = {}, {}, {}
  for _, name in ipairs(redis.call('ZRANGE', K .. 's', 0, -1)) do
    for _, blob in ipairs(redis.call('HVALS', K .. 'r:' .. name)) do collect(P, dead, unpack_(blob)[CELLS], homes) end
    redis.call('UNLINK', K .. 'r:' .. name)
  end
  for key, spots in pairs(dead) do freed[#freed + 1] = { key, spots } end
  for _, ix in ipairs(P.ix) do drop_index(P, ix) end
  for task = 1, P.nt do redis.call('UNLINK', K .. 'k:' .. task) end
  for claim in string.gmatch('p i s g d C R L', '%S') do redis.call('UNLINK', K .. claim) end
  redis.call('SET', K .. 'z', string.format('%.0f', P.inc), 'EX', 86400)
  return { OK, pack(freed) }, true
end

-- ARGV[1] is the op_id; ARGV[2] is '1' where it is past what is remembered. With 'done' comes the mutation's answer: of
-- the rows that it removed the client has told nobody yet.
local function resolve(keys, args)
  local K = keys[1]
  local old = redis.call('GET', K .. 'o:' .. args[1])
  if old == '!' then return { OK, 'refused' } end
  if old then return { OK, 'done', old } end
  if args[2] == '1' then return { OK, 'forgotten' } end
  refuse(K, args[1])
  return { OK, 'refused' }
end
